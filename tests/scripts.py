"""Training scripts of the kinds that people copy, each with two lines that choose its precision.

`run.begin` contains both: `with_masters(model, opt, dtype=...)` or nothing, and the scaler. A
script returns its model and its loss over fixed data. What else it computes, such as an average of
the weights, it compares with the same by hand.
"""

import math
from contextlib import nullcontext
from copy import deepcopy

import torch
from torch import distributed, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.testing import assert_close

from mixedfp.engine.forward import computing
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same


class Run:
    """A script under way, in "float32", under "autocast", with "masters" or "flat" ones."""

    def __init__(self, kind, dtype=torch.bfloat16, steps=None, save=None, resume=None):
        self.kind, self.dtype, self.n_steps = kind, dtype, steps
        self.is_mixed, self.save, self.resume = kind in ("masters", "flat"), save, resume

    def give(self, model, *opts):
        """Write the first line that changes."""
        if self.is_mixed:
            with_masters(model, *opts, dtype=self.dtype, flat_master=self.kind == "flat")

    def begin(self, model, **parts):
        """Write both lines; load what a killed run has saved of the model and the other parts."""
        self.give(model, *(p for p in parts.values() if isinstance(p, torch.optim.Optimizer)))
        is_on = self.kind != "float32" and self.dtype == torch.float16
        scaler = LossScaler if self.is_mixed else GradScaler
        self.scaler = scaler("cpu", init_scale=1024.0, enabled=is_on)
        self.parts = dict(parts, model=model, scaler=self.scaler)
        saved = {"step": 0} if self.resume is None else torch.load(self.resume, weights_only=True)
        self.first = saved.pop("step")
        for k, state in saved.items():
            self.parts[k].load_state_dict(state)

    def steps(self, n):
        """Yield the numbers of the steps, then save."""
        n = n if self.n_steps is None else self.n_steps
        for step in range(self.first, n):
            with torch.autocast("cpu", self.dtype, self.kind == "autocast", cache_enabled=False):
                yield step
        if self.save is not None:
            states = {k: v.state_dict() for k, v in self.parts.items()}
            torch.save({"step": n} | states, self.save)

    def descend(self, opt, loss, clip=None):
        """Take a step, as a script does that does not accumulate."""
        opt.zero_grad()
        self.scaler.scale(loss).backward()
        if clip is not None:
            self.scaler.unscale_(opt)
            clip_grad_norm_(self.parts["model"].parameters(), clip)
        self.scaler.step(opt)
        self.scaler.update()


def noise(step, *shape):
    """Random numbers of a step, the same in a resumed run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def integers(step, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(step))


def with_grads(model, loss):
    """Return a loss and its gradients, which the next step does not see."""
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def pairs(*models):
    return zip(*(m.parameters() for m in models), strict=True)


def average_by_hand(averages, model, share):
    """Move averages in float64 towards the weights of a model."""
    for average, p in pairs(averages, model):
        assert p.dtype == torch.float32
        average.data.lerp_(p.data.double(), share)


def check(model, averages):
    for p, average in pairs(model, averages):
        assert_close(p.detach().double(), average.detach(), rtol=0, atol=1e-6)


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 2, -1).permute(2, 0, 3, 1, 4)  # two heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, n))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=16, n=16, length=8):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, n), nn.Embedding(length, n)
        self.blocks, self.ln = nn.Sequential(Block(n), Block(n)), nn.LayerNorm(n)
        self.head = nn.Linear(n, vocab, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, targets=None):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.ln(self.blocks(x)))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.inference_mode()
    def generate(self, ids, n):
        """The words after `ids`, each the most probable one, and the last logits."""
        start, ids = ids.shape[1], F.pad(ids, (0, n))
        for t in range(start, start + n):
            logits = self(ids)
            ids[:, t] = logits[:, t - 1].argmax(-1)
        return ids, logits


def gpt(run):
    """A GPT: accumulation, a cosine schedule, weight decay for matrices only."""
    model = GPT()
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == is_2d] for is_2d in (1, 0))
    groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = LambdaLR(opt, lambda i: 0.1 + 0.45 * (1 + math.cos(math.pi * min(i / 40, 1))))
    run.begin(model, opt=opt, schedule=schedule)

    def batch(i):  # each word follows from the one before
        ids = (integers(i, 16, 8, 1) + 3 * torch.arange(9)) % 16
        return ids[:, :-1], ids[:, 1:]

    for step in run.steps(40):
        for i in (2 * step, 2 * step + 1):
            run.scaler.scale(model(*batch(i))[1] / 2).backward()
        run.scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 1.0)
        run.scaler.step(opt)
        run.scaler.update()
        opt.zero_grad(set_to_none=True)
        schedule.step()
        if step % 10 == 0:
            ids, logits = model.generate(integers(step, 16, 4, 2), 6)
            assert_same(model(ids.clone())[:, :-1].detach(), logits[:, :-1].clone())
            assert_same(logits[:, 1:-1].argmax(-1).clone(), ids[:, 2:].clone())
    return model, lambda m: m(*batch(10**6))[1]


def images(step):
    """Eight images of 8 x 8 pixels with a bright quarter, whose number is the class."""
    x, y = noise(step, 8, 3, 8, 8), integers(step, 4, 8)
    x.view(8, 3, 2, 4, 2, 4)[torch.arange(8), :, y // 2, :, y % 2] += 1
    return x, y


def classifier(run):
    """An image classifier: nesterov, one cycle, label smoothing, clipping."""
    low = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    high = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    model = nn.Sequential(*low, *high, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = OneCycleLR(opt, 0.05, total_steps=41)
    run.begin(model, opt=opt, schedule=schedule)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_of(m, step):
        x, y = images(step)
        return criterion(m(x), y)

    for step in run.steps(40):
        run.descend(opt, loss_of(model, step), clip=5.0)
        schedule.step()
    return model, lambda m: loss_of(m.eval(), 10**6)


def gan(run):
    """A DCGAN: two networks, two optimizers, three backward passes a step."""
    deconv = nn.ConvTranspose2d(8, 3, 4, 2, 1)
    start = nn.Linear(4, 128), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8), nn.ReLU()
    generator = nn.Sequential(*start, deconv, nn.Tanh())
    conv = nn.Conv2d(3, 8, 4, 2, 1)
    critic = nn.Sequential(conv, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))
    both = nn.ModuleDict(dict(generator=generator, critic=critic))
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), 2e-3, (0.5, 0.999)) for m in both.values())
    run.begin(both, opt_g=opt_g, opt_d=opt_d)
    criterion, scaler = nn.BCEWithLogitsLoss(), run.scaler
    for step in run.steps(40):
        real, ones, zeros = images(step)[0].tanh(), torch.ones(8, 1), torch.zeros(8, 1)
        opt_d.zero_grad()
        scaler.scale(criterion(critic(real), ones)).backward()
        fake = generator(noise(step, 8, 4))
        scaler.scale(criterion(critic(fake.detach()), zeros)).backward()
        scaler.step(opt_d)
        opt_g.zero_grad()
        scaler.scale(criterion(critic(fake), ones)).backward()
        scaler.step(opt_g)
        scaler.update()
    x = images(10**6)[0].tanh()
    return both, lambda m: criterion(m["critic"](x), torch.ones(8, 1))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(192, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 192)

    def encode(self, x):
        h = F.relu(self.fc1(x.view(-1, 192)))
        return self.fc21(h), self.fc22(h)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, eps):
        mu, logvar = self.encode(x)
        return self.decode(mu + eps * torch.exp(0.5 * logvar)), mu, logvar


def vae(run):
    """A VAE, as in PyTorch's examples, whose parts are also called from outside."""
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.begin(model, opt=opt)

    def loss_of(m, step, forward=None):
        x = images(step)[0].sigmoid()
        recon, mu, logvar = (t.float() for t in (forward or m)(x, noise(step, 8, 4)))
        bce = F.binary_cross_entropy(recon, x.view(-1, 192), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / 8

    def forward(x, eps):
        with computing(model) if run.is_mixed else nullcontext():
            return VAE.forward(model, x, eps)  # not `model.forward`: the parts, one by one

    for step in run.steps(40):
        run.descend(opt, loss_of(model, step, forward if step % 2 else None))
    inside, outside = (with_grads(model, loss_of(model, 0, f)) for f in (None, forward))
    assert_same(outside, inside)
    z = noise(0, 8, 4)
    assert_same(model.decode(z), deepcopy(model).decode(z))  # in float32
    return model, lambda m: loss_of(m, 10**6)


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.rnn = nn.GRU(16, 16, 2)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, hidden):
        out, hidden = self.rnn(self.encoder(ids), hidden)
        return self.decoder(out).view(-1, 12), hidden


def word_lm(run, bptt=6):
    """A word language model: truncated BPTT, clipping, a learning rate that falls."""
    model, state, zero = RNN(), nn.Module(), torch.zeros(2, 4, 16)
    state.hidden = nn.Buffer(zero)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    run.begin(model, opt=opt, state=state)
    text = (torch.arange(bptt * 64 + 1)[:, None] * torch.tensor([1, 5, 7, 11])) % 12  # (T, 4)
    for step in run.steps(40):
        at = (step * bptt) % (bptt * 64)
        out, hidden = model(text[at : at + bptt], state.hidden)
        state.hidden = hidden.detach()
        run.descend(opt, F.cross_entropy(out, text[at + 1 : at + 1 + bptt].flatten()), clip=0.25)
        if step == 30:
            for group in opt.param_groups:
                group["lr"] /= 4
    return model, lambda m: F.cross_entropy(m(text[:bptt], zero)[0], text[1 : bptt + 1].flatten())


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


def diffusion(run):
    """Diffusion: timesteps, a U-Net with time embedding, an average swapped in for evaluation."""
    model = UNet()
    ema, opt = deepcopy(model), torch.optim.AdamW(model.parameters(), lr=5e-3)
    run.begin(model, opt=opt, ema=ema)
    by_hand, alpha = deepcopy(ema).double(), torch.cumprod(1 - torch.linspace(1e-4, 0.2, 20), 0)

    def loss_of(m, step):
        x, t = images(step)[0], integers(step, 20, 8)
        eps, a = noise(step + 1, *x.shape), alpha[t].view(-1, 1, 1, 1)
        return F.mse_loss(m(a.sqrt() * x + (1 - a).sqrt() * eps, t).float(), eps)

    def copy_to_model(values):
        for p, value in zip(model.parameters(), values, strict=True):
            p.data.copy_(value.data)

    for step in run.steps(40):
        run.descend(opt, loss_of(model, step), clip=1.0)
        with torch.no_grad():
            for s, p in pairs(ema, model):
                s.sub_(0.1 * (s - p))
        average_by_hand(by_hand, model, 0.1)
        if step % 10 == 0:
            before = deepcopy(dict(model.state_dict()))
            stored = [p.detach().clone() for p in model.parameters()]
            copy_to_model(ema.parameters())
            averaged = deepcopy(model)
            run.give(averaged, torch.optim.SGD(averaged.parameters(), 0.1))
            with torch.no_grad():
                assert_same(loss_of(model, 0), loss_of(averaged, 0))
            copy_to_model(stored)
            assert_same(dict(model.state_dict()), before)
    check(ema, by_hand)
    return model, lambda m: loss_of(m, 10**6)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


def actor_critic(run):
    """An actor-critic, as in PyTorch's examples: the losses of a whole episode."""
    model = Policy()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.begin(model, opt=opt)

    def episode(m, step):
        state = noise(step, 16, 4)
        probs, value = (out.float() for out in m(state))
        draw = torch.rand(16, generator=torch.Generator().manual_seed(step))
        action = (draw > probs[:, 0].detach()).long()
        reward = (action == (state[:, 0] > 0)).float()
        log_prob = probs.gather(1, action[:, None]).squeeze(1).log()
        policy_loss = -(log_prob * (reward - value.squeeze(1).detach())).sum()
        return policy_loss + F.smooth_l1_loss(value.squeeze(1), reward, reduction="sum")

    for step in run.steps(60):
        run.descend(opt, episode(model, step))

    def regret(m):
        state = noise(10**6, 64, 4)
        right = (state[:, 0] > 0).long()
        return 1 - m(state)[0].float().gather(1, right[:, None]).mean()

    return model, regret


class FCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head, self.aux = nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        low = self.down(x)
        outs = dict(out=self.head(self.body(low)), aux=self.aux(low))
        return {k: F.interpolate(v, x.shape[-2:], mode="bilinear") for k, v in outs.items()}


def segmentation(run):
    """Segmentation: cross-entropy and Dice, a cosine schedule, an auxiliary head."""
    model = FCN()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = CosineAnnealingLR(opt, 41)
    run.begin(model, opt=opt, schedule=schedule)

    def loss_of(m, step):
        x, _ = images(step)
        outs, mask = m(x), (x.sum(1) > 0).long() + 2 * (x[:, 0] > 1).long()
        loss = F.cross_entropy(outs["out"], mask) + 0.5 * F.cross_entropy(outs["aux"], mask)
        p, true = outs["out"].float().softmax(1), F.one_hot(mask, 4).movedim(3, 1)
        dice = 2 * (p * true).sum((2, 3)) / (p.sum((2, 3)) + true.sum((2, 3)) + 1)
        return loss + 1 - dice.mean()

    for step in run.steps(40):
        run.descend(opt, loss_of(model, step))
        schedule.step()
    return model, lambda m: loss_of(m.eval(), 10**6)


def mlp(i, hidden, o):
    return nn.Sequential(nn.Flatten(), nn.Linear(i, hidden), nn.ReLU(), nn.Linear(hidden, o))


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp(192, 32, 4)
        self.teacher = deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def momentum_update(self):
        for k, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    def forward(self, x, eps):
        if torch.is_grad_enabled():
            self.momentum_update()
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x + eps), target


def mean_teacher(run):
    """A mean teacher, whose momentum update is in the forward pass as MoCo's, under DDP."""
    model = MeanTeacher()
    opt = torch.optim.SGD(model.student.parameters(), 0.05, momentum=0.9)
    run.begin(model, opt=opt)
    by_hand = deepcopy(model.teacher).double()
    ddp = DistributedDataParallel(model)
    for step in run.steps(40):
        average_by_hand(by_hand, model.student, 0.1)
        x, y = images(2 * step + distributed.get_rank())
        out, target = ddp(x, noise(step, *x.shape))
        consistency = F.mse_loss(out.float().softmax(1), target.float().softmax(1))
        run.descend(opt, F.cross_entropy(out.float(), y) + consistency)
        with torch.no_grad():  # it was updated before it was called
            assert_same(model(x, x)[1], target)
    check(model.teacher, by_hand)
    return model, lambda m: cross_entropy_of(m.teacher, 10**6)


def dqn(run):
    """A DQN: a target network with soft updates, replaced by the other one at times."""
    model = mlp(4, 32, 2)
    target = deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    run.begin(model, opt=opt, target=target)
    by_hand = deepcopy(target).double()

    def td_error(m, step):
        state, action, after = noise(step, 32, 4), integers(step, 2, 32), noise(step + 1, 32, 4)
        reward = (action == (state[:, 0] > 0)).float()
        value = m(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = target(after).max(1).values
        return F.smooth_l1_loss(value.float(), reward + 0.5 * best.float())

    for step in run.steps(60):
        run.descend(opt, td_error(model, step))
        if step % 20 == 5:
            target.load_state_dict(model.state_dict())
            by_hand = deepcopy(model).double()
        for t, p in pairs(target, model):
            t.data.lerp_(p.data, 0.05)
        average_by_hand(by_hand, model, 0.05)
    check(target, by_hand)
    return model, lambda m: td_error(m, 10**6)


def cross_entropy_of(model, step, sign=1):
    x, y = images(step)
    return F.cross_entropy(model(sign * x).float(), y)


def lottery(run):
    """A lottery ticket: the smallest weights are pruned, the others set back to early ones."""
    model = mlp(192, 32, 4)
    early, layers = deepcopy(model), (1, 3)
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.begin(model, opt=opt, early=early)
    for step in run.steps(40):
        run.descend(opt, cross_entropy_of(model, step))
        if step == 2:
            early.load_state_dict(model.state_dict())
        if step == 8:
            weights = [(model[i], "weight") for i in layers]
            prune.global_unstructured(weights, prune.L1Unstructured, amount=0.8)
            for i in layers:
                model[i].weight_orig.data = early[i].weight.data.clone()
                model[i].bias.data = early[i].bias.data.clone()
            opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            run.give(model, opt)
    for i in layers if prune.is_pruned(model) else ():
        is_off = model[i].weight_mask == 0
        assert_same(model[i].weight_orig[is_off], early[i].weight[is_off])  # no gradient, no step
        prune.remove(model[i], "weight")
        assert (model[i].weight == 0).equal(is_off) and model[i].weight.dtype == torch.float32
    return model, lambda m: cross_entropy_of(m, 10**6)


def ewc(run):
    """Elastic weight consolidation: a second task, with a penalty on the way from the first."""
    model = mlp(192, 32, 4)
    anchor, fisher = deepcopy(model), deepcopy(model)
    for f in fisher.parameters():
        f.data.zero_()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.begin(model, opt=opt, anchor=anchor, fisher=fisher)

    def penalty(m):
        each = pairs(m, anchor, fisher)
        return sum((f.detach() * (p - a.detach()).square()).sum() for p, a, f in each)

    for step in run.steps(40):
        if step == 6:
            anchor.load_state_dict(model.state_dict())
            for i in range(8):
                _, *grads = with_grads(model, cross_entropy_of(model, i))
                for f, g in zip(fisher.parameters(), grads, strict=True):
                    f.data += g.square() / 8
        loss = cross_entropy_of(model, step, 1 if step < 6 else -1)
        run.descend(opt, loss + 5 * penalty(model))
    plain = deepcopy(model)
    assert_same(*(with_grads(m, penalty(m)) for m in (model, plain)))
    return model, lambda m: cross_entropy_of(m, 10**6, -1)


def hogwild(run, model, steps, rank=None, in_turns=True):
    """Hogwild: two processes step shared weights, or one in their place where `rank` is None."""
    opt = torch.optim.SGD(model.parameters(), 0.05)
    run.begin(model, opt=opt)
    for step in run.steps(steps):
        if rank in (None, step % 2):
            run.descend(opt, cross_entropy_of(model, step))
        if rank is not None and in_turns:
            distributed.barrier()


SCRIPTS = [gpt, classifier, gan, vae, word_lm, diffusion, actor_critic, segmentation, mean_teacher]
SCRIPTS += [dqn, lottery, ewc]
