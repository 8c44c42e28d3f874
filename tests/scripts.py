"""Training scripts of the kinds that people copy, each with two lines that choose its precision.

`how.give(model, opt)` is `with_masters(model, opt, dtype=...)` or nothing, and `how.scaler()` a
`LossScaler`, a `GradScaler` or one that is turned off. `how.autocast()` stands where such a script
has it, and does nothing with masters. A script returns its loss over fixed data after training.
"""

import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler


@dataclass
class How:
    """How a script computes: in "float32", under "autocast", or with "masters"."""

    kind: str
    dtype: torch.dtype = torch.bfloat16

    def give(self, model, *opts):
        """The first line that changes."""
        if self.kind == "masters":
            with_masters(model, *opts, dtype=self.dtype)

    def scaler(self):
        """The second one."""
        is_on = self.dtype == torch.float16
        if self.kind == "masters":
            return LossScaler(init_scale=1024.0, enabled=is_on)
        return GradScaler("cpu", init_scale=1024.0, enabled=is_on and self.kind == "autocast")

    def autocast(self):
        """What a script with masters needs no more."""
        is_on = self.kind == "autocast"
        return torch.autocast("cpu", self.dtype) if is_on else nullcontext()


def noise(step, *shape):
    """Random numbers of a step, the same in a resumed run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def integers(step, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(step))


def keep(file, step, **parts):
    """Save as such scripts do."""
    if file is not None:
        torch.save({"step": step} | {k: v.state_dict() for k, v in parts.items()}, file)


def load(file, **parts):
    """Load what `keep` has saved; return the step to begin with."""
    if file is None:
        return 0
    saved = torch.load(file, weights_only=True)
    for k, v in parts.items():
        v.load_state_dict(saved[k])
    return saved["step"]


# --- a GPT: accumulation, a cosine schedule, weight decay for matrices only ---


class Block(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(n), nn.LayerNorm(n)
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, n))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=16, n=16, heads=2, layers=2, length=8):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, n), nn.Embedding(length, n)
        self.blocks = nn.ModuleList(Block(n, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(n), nn.Linear(n, vocab, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, targets):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(how, seed, steps=40, save=None, resume=None, accumulate=2):
    torch.manual_seed(seed)
    model = GPT()
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == is_2d] for is_2d in (1, 0))
    groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    how.give(model, opt)
    scaler = how.scaler()
    schedule = LambdaLR(opt, lambda i: 0.1 + 0.45 * (1 + math.cos(math.pi * min(i / 40, 1))))
    first = load(resume, model=model, opt=opt, scaler=scaler, schedule=schedule)

    def batch(i):  # each word follows from the one before
        ids = integers(i, 16, 8, 9)
        for t in range(1, 9):
            ids[:, t] = (5 * ids[:, t - 1] + 3) % 16
        return ids[:, :-1], ids[:, 1:]

    for step in range(first, steps):
        for micro in range(accumulate):
            with how.autocast():
                _, loss = model(*batch(step * accumulate + micro))
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        schedule.step()
    keep(save, steps, model=model, opt=opt, scaler=scaler, schedule=schedule)
    return model, lambda m: m(*batch(10**6))[1]


# --- an image classifier, as torchvision's reference script: SGD, warm-up, label smoothing ---


def images(step):
    """Eight images of 8 x 8 pixels with a bright quarter, whose number is the class."""
    x, y = noise(step, 8, 3, 8, 8), integers(step, 4, 8)
    for i, k in enumerate(y):
        x[i, :, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 1
    return x, y


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


def classifier(how, seed, steps=40, save=None, resume=None):
    torch.manual_seed(seed)
    model = nn.Sequential(conv(3, 8), conv(8, 16, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model.append(nn.Linear(64, 4))
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    how.give(model, opt)
    scaler = how.scaler()
    schedule = OneCycleLR(opt, 0.05, total_steps=41)
    first = load(resume, model=model, opt=opt, scaler=scaler, schedule=schedule)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for step in range(first, steps):
        image, target = images(step)
        with how.autocast():
            output = model(image)
            loss = criterion(output, target)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        schedule.step()
    keep(save, steps, model=model, opt=opt, scaler=scaler, schedule=schedule)

    @torch.no_grad()
    def evaluate(m):
        image, target = images(10**6)
        return criterion(m.eval()(image), target)

    return model, evaluate


# --- a DCGAN: two networks, two optimizers, three backward passes a step ---


def gan(how, seed, steps=40, save=None, resume=None):
    torch.manual_seed(seed)
    deconv = nn.ConvTranspose2d(8, 3, 4, 2, 1)
    generator = nn.Sequential(nn.Linear(4, 128), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8))
    generator.extend([nn.ReLU(), deconv, nn.Tanh()])
    critic = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten())
    critic.append(nn.Linear(128, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    both = nn.ModuleDict(dict(generator=generator, critic=critic))
    how.give(both, opt_g, opt_d)
    scaler = how.scaler()
    first = load(resume, model=both, opt_g=opt_g, opt_d=opt_d, scaler=scaler)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(first, steps):
        real, ones, zeros = images(step)[0].tanh(), torch.ones(8, 1), torch.zeros(8, 1)
        opt_d.zero_grad()
        with how.autocast():
            loss_real = criterion(critic(real), ones)
        scaler.scale(loss_real).backward()
        fake = generator(noise(step, 8, 4))
        with how.autocast():
            loss_fake = criterion(critic(fake.detach()), zeros)
        scaler.scale(loss_fake).backward()
        scaler.step(opt_d)
        opt_g.zero_grad()
        with how.autocast():
            loss_g = criterion(critic(fake), ones)
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        scaler.update()
    keep(save, steps, model=both, opt_g=opt_g, opt_d=opt_d, scaler=scaler)
    x = images(10**6)[0].tanh()
    return both, lambda m: criterion(m["critic"](x), torch.ones(8, 1))


# --- a VAE, as in PyTorch's examples ---


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(192, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 192)

    def forward(self, x, eps):
        h = F.relu(self.fc1(x.view(-1, 192)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae(how, seed, steps=60, save=None, resume=None):
    torch.manual_seed(seed)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    how.give(model, opt)
    scaler = how.scaler()
    first = load(resume, model=model, opt=opt, scaler=scaler)

    def loss_of(m, step):
        x = images(step)[0].sigmoid()
        with how.autocast():
            recon, mu, logvar = m(x, noise(step, 8, 4))
        bce = F.binary_cross_entropy(recon.float(), x.view(-1, 192), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar.float() - mu.float().pow(2) - logvar.float().exp())
        return (bce + kld) / 8

    for step in range(first, steps):
        opt.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(opt)
        scaler.update()
    keep(save, steps, model=model, opt=opt, scaler=scaler)
    return model, lambda m: loss_of(m, 10**6)


# --- a word language model: truncated BPTT, clipping, a learning rate that falls ---


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.rnn = nn.GRU(16, 16, 2)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, hidden):
        out, hidden = self.rnn(self.encoder(ids), hidden)
        return self.decoder(out).view(-1, 12), hidden


def word_lm(how, seed, steps=40, save=None, resume=None, bptt=6):
    torch.manual_seed(seed)
    model = RNN()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    how.give(model, opt)
    scaler = how.scaler()
    text = (torch.arange(bptt * 64 + 1)[:, None] * torch.tensor([1, 5, 7, 11])) % 12  # (T, 4)
    first, hidden = load(resume, model=model, opt=opt, scaler=scaler), None
    if first:
        hidden = torch.load(f"{resume}.hidden", weights_only=True)
    for step in range(first, steps):
        at = (step * bptt) % (bptt * 64)
        hidden = torch.zeros(2, 4, 16) if hidden is None else hidden.detach()
        with how.autocast():
            out, hidden = model(text[at : at + bptt], hidden)
            loss = F.cross_entropy(out, text[at + 1 : at + 1 + bptt].flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(opt)
        scaler.update()
        if step == 30:
            for group in opt.param_groups:
                group["lr"] /= 4
    keep(save, steps, model=model, opt=opt, scaler=scaler)
    if save is not None:
        torch.save(hidden, f"{save}.hidden")
    ids, zero = text[: bptt + 1], torch.zeros(2, 4, 16)
    return model, lambda m: F.cross_entropy(m(ids[:-1], zero)[0], ids[1:].flatten())


# --- diffusion: timesteps, a U-Net with time embedding, an average of the weights ---


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.down, self.mid = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.out = nn.Conv2d(6, 3, 3, 1, 1)

    def forward(self, x, t):
        angle = t[:, None] * torch.exp(-torch.arange(4) * math.log(100.0) / 4)
        t = self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        h = F.silu(self.down(x)) + t
        h = h + self.mid(F.silu(self.norm(h)))
        return self.out(torch.cat([self.up(h), x], 1))


def diffusion(how, seed, steps=60, save=None, resume=None):
    torch.manual_seed(seed)
    model = UNet()
    ema = deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    how.give(model, opt)
    scaler = how.scaler()
    first = load(resume, model=model, opt=opt, scaler=scaler, ema=ema)
    alpha = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 20), 0)

    def loss_of(m, step):
        x, t = images(step)[0], integers(step, 20, 8)
        eps, a = noise(step + 1, *x.shape), alpha[t].view(-1, 1, 1, 1)
        with how.autocast():
            predicted = m(a.sqrt() * x + (1 - a).sqrt() * eps, t)
        return F.mse_loss(predicted.float(), eps)

    for step in range(first, steps):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    keep(save, steps, model=model, opt=opt, scaler=scaler, ema=ema)
    return model, lambda m: loss_of(m, 10**6)


# --- an actor-critic, as in PyTorch's examples: losses of a whole episode ---


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


def actor_critic(how, seed, steps=60, save=None, resume=None):
    torch.manual_seed(seed)
    model = Policy()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    how.give(model, opt)
    scaler = how.scaler()
    first = load(resume, model=model, opt=opt, scaler=scaler)

    def episode(m, step):
        state = noise(step, 16, 4)
        with how.autocast():
            probs, value = m(state)
        probs, value = probs.float(), value.float().squeeze(1)
        draw = torch.rand(16, generator=torch.Generator().manual_seed(step))
        action = (draw > probs[:, 0].detach()).long()
        reward = (action == (state[:, 0] > 0)).float()
        advantage = reward - value.detach()
        log_prob = torch.log(probs.gather(1, action[:, None])).squeeze(1)
        return -(log_prob * advantage).sum() + F.smooth_l1_loss(value, reward, reduction="sum")

    for step in range(first, steps):
        opt.zero_grad()
        scaler.scale(episode(model, step)).backward()
        scaler.step(opt)
        scaler.update()
    keep(save, steps, model=model, opt=opt, scaler=scaler)

    def regret(m):
        state = noise(10**6, 64, 4)
        right = (state[:, 0] > 0).long()
        return 1 - m(state)[0].float().gather(1, right[:, None]).mean()

    return model, regret


# --- segmentation: cross-entropy and Dice, a polynomial learning rate, an auxiliary head ---


class FCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.body = conv(3, 8, 2), conv(8, 16)
        self.head, self.aux = nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        low = self.down(x)
        outs = dict(out=self.head(self.body(low)), aux=self.aux(low))
        return {k: F.interpolate(v, x.shape[-2:], mode="bilinear") for k, v in outs.items()}


def segmentation(how, seed, steps=40, save=None, resume=None):
    torch.manual_seed(seed)
    model = FCN()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    how.give(model, opt)
    scaler = how.scaler()
    schedule = CosineAnnealingLR(opt, 41)
    first = load(resume, model=model, opt=opt, scaler=scaler, schedule=schedule)

    def loss_of(m, step):
        x, _ = images(step)
        mask = (x.sum(1) > 0).long() + 2 * (x[:, 0] > 1).long()
        with how.autocast():
            outs = m(x)
        loss = sum(w * F.cross_entropy(outs[k], mask) for k, w in (("out", 1.0), ("aux", 0.5)))
        p, true = outs["out"].float().softmax(1), F.one_hot(mask, 4).movedim(3, 1)
        dice = 2 * (p * true).sum((2, 3)) / (p.sum((2, 3)) + true.sum((2, 3)) + 1)
        return loss + 1 - dice.mean()

    for step in range(first, steps):
        opt.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
    keep(save, steps, model=model, opt=opt, scaler=scaler, schedule=schedule)
    return model, lambda m: loss_of(m.eval(), 10**6)


SCRIPTS = [gpt, classifier, gan, vae, word_lm, diffusion, actor_critic, segmentation]
