"""GPT-2 as a plain PyTorch program, such as many people train with.

The program computes full logits, `F.cross_entropy` and PyTorch's own attention, with tied embeddings and nothing fused
by hand. With `loss_chunk_tokens` it never holds all logits, as users of large vocabularies have it. As a contender it
shows what a user gains or loses by choosing Crosscut instead.

Shapes: B batch, S sequence, N tokens, H hidden, A heads, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention, from [B, S, H] to [B, S, H]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and all earlier ones."""
        B, S, H = x.shape
        q, k, v = (part.view(B, S, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x).split(H, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(heads.transpose(1, 2).contiguous().view(B, S, H))


class Block(nn.Module):
    """A transformer layer with a layer norm before each sublayer."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.expand = nn.Linear(hidden_size, 4 * hidden_size)
        self.contract = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of `hidden` [N, H] times `weight` [V, H]^T with `targets` [N], some tokens at a time.

    The forward pass computes the gradients of each chunk beside its loss, as Liger's does, so no logits are kept or
    computed again. The gradient of the weight is summed in the weight's type.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        """Return the loss, and keep the gradients."""
        narrow = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden, of_weight = [], torch.zeros_like(weight)
        for x, target in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            logits = (x @ narrow.t()).float()
            lse = logits.logsumexp(1, keepdim=True)
            total = total + (lse - logits.gather(1, target[:, None])).sum()
            columns = torch.arange(logits.shape[1], device=logits.device)
            error = (logits - lse).exp() - (columns == target[:, None]).float()
            grad = (error / len(hidden)).to(hidden.dtype)
            of_hidden.append(grad @ narrow)
            of_weight = of_weight + (grad.t() @ x)
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the kept gradients times the gradient of the loss."""
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * grad.to(of_hidden.dtype), of_weight * grad, None, None


class PlainGPT(nn.Module):
    """A GPT-2 that turns token ids and targets [B, S] into their mean cross entropy."""

    def __init__(
        self,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        vocab_size: int,
        sequence_length: int,
        loss_chunk_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.loss_chunk_tokens = loss_chunk_tokens
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(sequence_length, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("output.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * num_layers) if into_residual else 1.0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if self.loss_chunk_tokens:
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
            hidden = self.final_norm(x).to(dtype).flatten(0, 1)
            loss: Tensor = ChunkedLoss.apply(hidden, self.head.weight, targets.flatten(), self.loss_chunk_tokens)
            return loss
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
