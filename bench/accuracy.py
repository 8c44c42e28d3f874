"""Train one model in several precisions: accuracy over seeds.

    python bench/accuracy.py --out bench/results/accuracy.json    # 10 minutes
    python bench/accuracy.py --seeds 0 --epochs 1                 # a quick look

Needs CIFAR-10 (see `mixedfp.examples.cifar10`).
"""

from functools import partial
from itertools import product
from statistics import mean, stdev

from common import about, options, table, write

from mixedfp.examples import MODELS, cifar10, train_once


def main() -> None:
    """Do the runs, writing the file after each rate and precision, and print the table."""
    args = options(
        __doc__,
        precisions=["fp32", "bf16-flat", "bf16", "bf16-pure", "fp16-flat"],
        lrs=[0.01, 0.001],
        seeds=[0, 1, 2],
        epochs=2,
        n_train=2000,
        n_valid=500,
        threads=2,
    )
    dls = partial(cifar10, n_train=args.n_train, n_valid=args.n_valid, bs=64, device="cpu")
    model, rows = MODELS["darknet"], []
    for lr, name in product(args.lrs, args.precisions):
        runs = [train_once(name, dls, model, "sgd", args.epochs, lr, seed) for seed in args.seeds]
        percents = [100 * run["accuracy"] for run in runs]
        row = {"lr": lr, "precision": name, "seeds": len(runs), "accuracy_mean": mean(percents)}
        row["accuracy_sd"] = stdev(percents) if len(runs) > 1 else None
        row["valid_loss"] = mean(run["valid_loss"] for run in runs)
        rows.append(row | {"skipped": sum(run["skipped"] for run in runs)})
        given = {k: getattr(args, k) for k in ("epochs", "n_train", "n_valid")}
        write(args.out, about() | given | dict(model="darknet", opt="sgd", bs=64, results=rows))
    table(rows, "lr precision accuracy_mean:.1f accuracy_sd:.1f valid_loss:.3f skipped")


if __name__ == "__main__":
    main()
