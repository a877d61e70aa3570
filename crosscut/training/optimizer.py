"""AdamW as in the paper's section 4.1.1: decoupled weight decay, not on biases and layer norms."""

from torch import nn
from torch.optim import AdamW

from crosscut.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over a model's distributed parameters, in PyTorch's fused form; its rate is set at every step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def apply_settings(optimizer: AdamW, config: OptimizerConfig) -> None:
    """Put the run's settings in force again after a checkpoint has brought back those that it was written with."""
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(weight_decay=decay, betas=(config.beta1, config.beta2), eps=config.epsilon)


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
