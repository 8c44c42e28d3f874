"""The transformers that benchmarks train; they need only PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and two linear layers, each with a norm before it and a skip connection."""

    is_causal = False

    def __init__(self, d: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        """Apply self-attention."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class CausalBlock(Block):
    """A block in which a word attends to those before it."""

    is_causal = True


class ViT(nn.Module):
    """A vision transformer that averages its patches."""

    def __init__(
        self, n_layers: int, d: int, n_heads: int, size: int, patch: int, n_classes: int = 10
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, stride=patch)
        self.place = nn.Parameter(torch.zeros((size // patch) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, n_heads) for _ in range(n_layers)))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(x).mean(1))


class LM(nn.Module):
    """A language model of 30 million parameters: blocks that attend to earlier words."""

    def __init__(self, n_words: int = 8000, d: int = 512, n_layers: int = 7, n_heads: int = 8):
        super().__init__()
        self.words = nn.Embedding(n_words, d)
        self.blocks = nn.Sequential(*(CausalBlock(d, n_heads) for _ in range(n_layers)))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, n_words, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of each next word."""
        return self.head(self.blocks(self.words(x)))


class GPT(LM):
    """A language model with learned positions, whose head shares the embedding's weight.

    With 50,304 words, 768 numbers and 12 layers it is as large as GPT-2 small: 124 million.
    """

    def __init__(
        self,
        n_words: int = 50304,
        d: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        n_places: int = 1024,
    ):
        super().__init__(n_words, d, n_layers, n_heads)
        self.place = nn.Embedding(n_places, d)
        for table in (self.words, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.head[1].weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of each next word."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.words(x) + self.place(places)))


def loss_of(pred: Tensor, y: Tensor) -> Tensor:
    """Compute the loss, always in 32 bits."""
    return F.cross_entropy(pred.float().flatten(0, -2), y.flatten())


def images(bs: int, size: int, n_classes: int = 10) -> tuple[tuple[Tensor, ...], Tensor]:
    """Create a batch of images and their classes."""
    return (torch.randn(bs, 3, size, size),), torch.randint(n_classes, (bs,))


def words(bs: int, n: int, n_words: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Create a batch of texts and the words that follow."""
    text = torch.randint(n_words, (bs, n + 1))
    return (text[:, :-1].contiguous(),), text[:, 1:].contiguous()
