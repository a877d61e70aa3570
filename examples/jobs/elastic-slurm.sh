#!/bin/bash
# A run on four nodes, which continues without a node that fails (docs/elastic.md).
#SBATCH --job-name=gpt2
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append

# `python`, `torchrun` and `crosscut` are those of this environment. For an image, see slurm.sh.
export PATH=/shared/crosscut/bin:$PATH
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds for two steps and a checkpoint: less than those of --signal
host=$(hostname)
port=$((20000 + SLURM_JOB_ID % 20000))
python -c "import signal, torch.distributed as dist
store = dist.TCPStore('0.0.0.0', $port, is_master=True, wait_for_workers=False)
signal.pause()" &

srun --no-kill --kill-on-bad-exit=0 torchrun --nnodes=1:$SLURM_NNODES --nproc-per-node=8 --max-restarts=100 \
    --rdzv-backend=c10d --rdzv-endpoint=$host:$port --rdzv-id=$SLURM_JOB_ID-$SLURM_RESTART_COUNT \
    --rdzv-conf=is_host=0 --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 \
    -m crosscut train run.toml

if [ ! -e runs/gpt2/summary.json ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
