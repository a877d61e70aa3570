#!/bin/bash
# A run of 16 ranks on two nodes, which goes back into the queue when it is asked to stop or has crashed (docs/running.md).
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# A run stops up to two steps after the signal, and then writes a checkpoint: --signal must leave the seconds of both.
# `crosscut plan run.toml` prints the seconds of a step and the size of a checkpoint: divide it by the speed of the disk.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# `crosscut` below is the one of the environment in which Crosscut is installed (docs/install.md), on all nodes:
export PATH=/shared/crosscut/bin:$PATH
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# In the image of Containerfile instead, which has its own PATH, with pyxis or with Apptainer. Not tested on a cluster.
#   srun --label --container-image=/shared/crosscut.sqsh --container-mounts="$PWD:/work" --container-workdir=/work bash -c
#   srun --label apptainer exec --nv --bind "$PWD:/work" --pwd /work /shared/crosscut.sif bash -c
srun --label bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec crosscut train run.toml layout.tensor=8 layout.data=2 --resume auto'
status=$?

case $status in
    0 | 2 | 65) ;; # complete, or an error that another start would repeat
    75) scontrol requeue "$SLURM_JOB_ID" ;; # asked to stop
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID" ;; # a rank has failed
esac
exit $status
