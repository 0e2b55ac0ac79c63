"""What the ranks of `test_ranks.py` do, run by torchrun; and, called in one process, what they have to agree with.

`CASES` are functions of (rank, world) that return tensors and numbers: on all ranks together they have to give what
(0, 1) gives in one process. `MISTAKES` are calls that have to fail on all ranks.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

if __name__ == "__main__":
    from jaxtyping import install_import_hook

    with install_import_hook("errbar", "shapes.check_shapes"):
        import errbar
else:
    import errbar

Values = dict[str, Any]
SAMPLES, CLASSES = 53, 4
STRUCTURES = ["dense", "block", "kron", "diag"]


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Linear layers and a layer norm, which is no linear layer."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def samples(count: int = SAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs, and labels drawn from what the network makes of them at a temperature of 2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        return x, torch.softmax(network()(x) / 2, 1).multinomial(1, generator=generator)[:, 0]


def data_set(count: int = SAMPLES, seed: int = 1) -> TensorDataset:
    return TensorDataset(*samples(count, seed))


def own_batches(rank: int, world: int, empty: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches of different sizes, the first rank with most of them; rank `empty` has none."""
    x, y = samples()
    sizes = [1, 7, 3, 12, 5, 2, 9, 14]
    having = [r for r in range(world) if r != empty] or [0]
    owner = [having[min(i // 3, len(having) - 1)] for i in range(len(sizes))]
    parts = zip(x.split(sizes), y.split(sizes), owner, strict=True)
    return [(inputs, labels) for inputs, labels, own in parts if own == rank]


def told(information: errbar.Information) -> Values:
    return {
        "matrix": information.dense(),
        "n_samples": information.n_samples,
        "log_likelihood": information.log_likelihood,
    }


def collected(data: Any, **options: Any) -> Values:
    options = {"parameters": "all"} | options
    return told(errbar.collect(options.pop("model", None) or network(), data, **options))


def merged(parts: dict[str, Values]) -> Values:
    return {f"{name}, {what}": value for name, values in parts.items() for what, value in values.items()}


# ------------------------------------------------------------------------------------------------------------ cases


def a_data_set(rank: int, world: int) -> Values:
    found = {structure: collected(data_set(), structure=structure) for structure in STRUCTURES}
    found["per class"] = collected(data_set(), parameters=None, last_layers=1, fisher="eta")
    wrapped = nn.parallel.DistributedDataParallel(network()) if world > 1 else network()
    found["last layer"] = collected(data_set(), parameters=None, last_layers=1, model=wrapped)
    return merged(found)


def a_float32_model(rank: int, world: int) -> Values:
    model = network(torch.float32)
    return merged({s: collected(data_set(), structure=s, model=model) for s in ("dense", "kron")})


def uneven_batches(rank: int, world: int) -> Values:
    mine = own_batches(rank, world)
    return merged({structure: collected(iter(mine), structure=structure) for structure in STRUCTURES})


def a_rank_without_data(rank: int, world: int) -> Values:
    """The first rank, which leads, in one half; the last in the other."""
    first = {s: collected(own_batches(rank, world, empty=0), structure=s) for s in STRUCTURES}
    last = {f"{s} last": collected(own_batches(rank, world, empty=world - 1), structure=s) for s in STRUCTURES}
    eta = collected(own_batches(rank, world, empty=0), parameters=None, last_layers=1, fisher="eta")
    return merged(first | last | {"per class": eta})


def with_weights(batch: tuple[Tensor, Tensor]) -> Any:
    """Weights that follow from the inputs, some of them zero."""
    x, y = batch
    return (x,), {}, y, x[:, 0].clamp_min(0)


def weighted_samples(rank: int, world: int) -> Values:
    mine: dict[str, Any] = {"unpack": with_weights, "class_weights": [1.0, 2.0, 0.5, 3.0]}
    found = {s: collected(own_batches(rank, world, empty=0), structure=s, **mine) for s in STRUCTURES}
    return merged(found | {"a data set": collected(data_set(), fisher="sampled", **mine)})


class Scaled(nn.Module):
    """A network whose input goes through a function that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, x: Tensor, scale: Any) -> Any:
        return self.inside(scale(x) if callable(scale) else scale * x)


def with_a_function(batch: tuple[Tensor, Tensor]) -> Any:
    return (batch[0], torch.tanh), {}, batch[1]


def arguments_of_other_kinds(rank: int, world: int) -> Values:
    """Keywords and numbers are sent to a rank without data; functions are not, and need not be where all have some."""
    mappings = [{"x": x, "scale": 0.5, "labels": y} for x, y in own_batches(rank, world, empty=0)]
    functions = collected(own_batches(rank, world), model=Scaled(), unpack=with_a_function)
    return merged({"mappings": collected(mappings, model=Scaled()), "functions": functions})


def fewer_samples_than_ranks(rank: int, world: int) -> Values:
    loader = DataLoader(data_set(1), batch_size=4)
    return merged({"data set": collected(data_set(1)), "loader": collected(loader)})


def distributed_samplers(rank: int, world: int) -> Values:
    """The padding of a sampler must not count: in one process there is none."""
    found = {}
    for count in (1, SAMPLES, 54):
        for shuffle in (False, True):
            sampler = DistributedSampler(data_set(count), num_replicas=world, rank=rank, shuffle=shuffle, seed=3)
            sampler.set_epoch(2)
            found[f"{count} {shuffle}"] = collected(DataLoader(data_set(count), batch_size=4, sampler=sampler))
    sampler = DistributedSampler(data_set(), num_replicas=world, rank=rank)
    found["in batches"] = collected(DataLoader(data_set(), batch_sampler=BatchSampler(sampler, 4, drop_last=False)))
    found["one by one"] = collected(Stacked(DataLoader(data_set(), batch_size=None, sampler=sampler)).loader)
    return merged(found)


class Stacked:
    """A loader without batches of its own, over a data set whose items are batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        dataset = TensorDataset(*(tensor[:, None] for tensor in samples()))
        self.loader = DataLoader(dataset, batch_size=None, sampler=loader.sampler)


def loaders(rank: int, world: int) -> Values:
    """Without a DistributedSampler a loader is divided, whatever its order."""
    subset = SubsetRandomSampler(range(0, SAMPLES, 2), generator=torch.Generator().manual_seed(rank))
    return merged(
        {
            "in order": collected(DataLoader(data_set(), batch_size=8)),
            "shuffled": collected(DataLoader(data_set(), batch_size=8, shuffle=True)),
            "complete batches": collected(DataLoader(data_set(), batch_size=8, drop_last=True)),
            "a subset": collected(DataLoader(data_set(), batch_size=8, sampler=subset)),
            "scaled": collected(DataLoader(data_set(), batch_size=8, collate_fn=with_scaled_inputs)),
        }
    )


def with_scaled_inputs(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return 2 * torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def labels_missing_on_one_rank(rank: int, world: int) -> Values:
    batches = own_batches(rank, world)
    return collected([x for x, _ in batches] if rank == world - 1 else batches)


def a_posterior(rank: int, world: int) -> Values:
    """fit, update, forget, calibrate and predict, as one would write them for one process."""
    x, y = samples()
    posterior = errbar.fit(network(), data_set(), last_layers=2, prior=errbar.Prior(2.0))
    more = posterior.update(data_set(20, seed=5))
    less = posterior.forget(TensorDataset(x[:15], y[:15]))
    few = posterior.update([samples(1, seed=6)] if rank == world - 1 else [])
    calibrated = errbar.calibrate(posterior, data_set(90, seed=7), samples=100)
    inputs = samples(12, seed=8)[0]
    parts = inputs.tensor_split(world)
    prediction = calibrated.predict(parts[rank], samples=50)
    gathered: list[Any] = [None] * world
    if world > 1:
        dist.all_gather_object(gathered, prediction.pmf)
    return {
        "covariance": posterior.covariance(),
        "more": more.covariance(),
        "less": less.covariance(),
        "few": few.covariance(),
        "evidence": posterior.log_evidence(),
        "pmf": torch.cat(gathered) if world > 1 else prediction.pmf,
    }


def calibration(rank: int, world: int) -> Values:
    found: Values = {}
    for structure, layers in (("dense", 2), ("kron", 1), ("diag", 2)):
        posterior = errbar.fit(network(), data_set(), last_layers=layers, structure=structure)
        held_out = data_set(90, seed=7)
        # The first rank without data, which has to learn the basis of the covariances too.
        own = [held_out[:]] if rank == world - 1 else []
        for objective in ("nll", "ece"):
            for name, data in (("whole", held_out), ("own", own)):
                made = errbar.calibrate(posterior, data, objective=objective, samples=100)
                found[f"{structure} {objective} {name} T"] = made.temperature
                found[f"{structure} {objective} {name} T_c"] = made.covariance_scale
    return found


def fusions(rank: int, world: int) -> Values:
    """A fusion of two networks: of a data set that the ranks share, and of batches of which the last rank has all."""
    pair = [errbar.fit(network(), data_set(), last_layers=layers) for layers in (1, 2)]
    held_out = data_set(90, seed=7)
    x, y = held_out[:]
    found: Values = {}
    for name, data in (("whole", held_out), ("own", [([x, x], y)] if rank == world - 1 else [])):
        fused = errbar.calibrate_fusion(pair, data, samples=32)
        assert fused.table is not None
        found[f"{name} T"], found[f"{name} q"] = fused.temperature, fused.covariance_scale
        found[f"{name} weights"] = torch.tensor(fused.table.weights)
        found[f"{name} nll"] = torch.tensor([row.nll for row in fused.table.rows])
    return found


def sketches(rank: int, world: int) -> Values:
    """Compared by their bound, as sketches of other streams are other sketches."""
    found: Values = {}
    for name, data in (("whole", data_set()), ("empty", own_batches(rank, world, empty=0))):
        information = errbar.collect(network(), data, parameters="all", structure="lowrank", rank=12)
        total: Any = information.total
        found |= {f"{name} {what}": value for what, value in told(information).items()}
        found |= {f"{name} bound": total.bound, f"{name} rows": total.rows, f"{name} diagonal": total.diagonal}
    return found


def groups(rank: int, world: int) -> Values:
    """Two ranks of three, and each alone."""
    alone = collected(data_set(10 + rank), group=False)
    pair = dist.new_group([0, 1]) if world > 2 else None
    if world > 2 and rank == 2:
        return {"n": float(alone["n_samples"]), "pair": None, "refused": failure(lambda: collected([], group=pair))}
    both = collected(data_set(), group=pair) if world > 1 else collected(data_set())
    return {"n": float(alone["n_samples"]), "pair": both["matrix"], "refused": None}


def warned(rank: int, world: int) -> Values:
    """What is said where the ranks read the same, or not the same, data."""
    with warnings.catch_warnings(record=True) as same:
        warnings.simplefilter("always")
        counted = collected([samples()])["n_samples"]
    with warnings.catch_warnings(record=True) as other:
        warnings.simplefilter("always")
        collected(data_set(seed=rank))
    with warnings.catch_warnings(record=True) as stream:
        warnings.simplefilter("always")
        collected(Streaming())
    return {
        "counted": counted,
        "same": [str(w.message) for w in same],
        "other": [str(w.message) for w in other],
        "stream": [str(w.message) for w in stream],
    }


class Streaming(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data_set(5))


def planned_batches(rank: int, world: int) -> Values:
    """How many samples a batch has, for what is said of memory, on a rank without data too."""
    mine = [samples(30 + rank, seed=rank)] if rank < max(1, world - 1) else []
    information = errbar.collect(network(), mine, last_layers=1)
    return {"size": information.task.batch_size}


CASES: dict[str, Callable[[int, int], Values]] = {
    case.__name__: case
    for case in (
        a_data_set,
        a_float32_model,
        uneven_batches,
        a_rank_without_data,
        weighted_samples,
        arguments_of_other_kinds,
        fewer_samples_than_ranks,
        distributed_samplers,
        loaders,
        labels_missing_on_one_rank,
        a_posterior,
        calibration,
        fusions,
        sketches,
        groups,
        warned,
        planned_batches,
    )
}


# --------------------------------------------------------------------------------------------------------- mistakes


class Failing(Dataset[Any]):
    """A data set whose last sample cannot be read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == SAMPLES - 1:
            raise FileNotFoundError("picture 52 is not there")
        x, y = samples()
        return x[index], y[index]


def not_a_number(rank: int, world: int) -> None:
    x, y = samples()
    x[-1, 0] = float("nan")
    collected(TensorDataset(x, y))


def infinite_logits(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(5, CLASSES)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    x, y = samples(8)
    x[-1] = 1e308
    collected(TensorDataset(x, y), model=model)


def a_label_out_of_range(rank: int, world: int) -> None:
    x, y = samples()
    y[-1] = CLASSES
    errbar.calibrate(errbar.fit(network(), data_set(), last_layers=1), TensorDataset(x, y))


def a_file_that_is_missing(rank: int, world: int) -> None:
    collected(Failing())


def a_checkpoint_without_a_name(rank: int, world: int) -> None:
    collected(data_set(), checkpoint=5 if rank == world - 1 else None)


def a_first_batch_without_a_tensor(rank: int, world: int) -> None:
    """On the rank that the others learn the layers from, which wait for it."""
    mine = [(["some", "text"], None)] if rank == 0 else own_batches(rank, world, empty=0)
    collected(mine, unpack=lambda batch: (batch[:1], {}, batch[1]))


def a_mistake_while_others_are_busy(rank: int, world: int) -> None:
    """The other ranks have half a minute of work left when the last one fails."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(300):
            if rank == world - 1 and index == 3:
                raise ValueError("the disk is gone")
            time.sleep(0.1)
            yield samples(2, seed=300 * rank + index)

    collected(batches())


def other_weights(rank: int, world: int) -> None:
    collected(data_set(), model=network(seed=rank))


def other_options(rank: int, world: int) -> None:
    collected(data_set(), fisher="ggn" if rank == 0 else "eta")


def an_unknown_option_on_one_rank(rank: int, world: int) -> None:
    collected(data_set(), structure="dense" if rank == 0 else "dens")


def other_lengths(rank: int, world: int) -> None:
    collected(data_set(SAMPLES - rank))


def other_kinds(rank: int, world: int) -> None:
    collected(data_set() if rank == 0 else [])


def nothing_at_all(rank: int, world: int) -> None:
    collected([])


def nothing_to_calibrate_on(rank: int, world: int) -> None:
    errbar.calibrate(errbar.fit(network(), data_set(), last_layers=1), [])


def nothing_to_forget(rank: int, world: int) -> None:
    errbar.fit(network(), data_set(), last_layers=1).forget([])


def other_seeds(rank: int, world: int) -> None:
    sampler = DistributedSampler(data_set(), num_replicas=world, rank=rank, seed=rank)
    collected(DataLoader(data_set(), sampler=sampler))


def one_part_twice(rank: int, world: int) -> None:
    sampler = DistributedSampler(data_set(), num_replicas=world, rank=0)
    collected(DataLoader(data_set(), sampler=sampler))


def parts_that_nobody_reads(rank: int, world: int) -> None:
    sampler = DistributedSampler(data_set(), num_replicas=world + 2, rank=rank)
    collected(DataLoader(data_set(), sampler=sampler))


def draws_with_replacement(rank: int, world: int) -> None:
    collected(DataLoader(data_set(), sampler=RandomSampler(data_set(), replacement=True)))


def draws_by_weight(rank: int, world: int) -> None:
    collected(DataLoader(data_set(), sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)))


def no_length(rank: int, world: int) -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return data_set()[index % SAMPLES]

    collected(Endless())


def arguments_that_cannot_be_sent(rank: int, world: int) -> None:
    own = own_batches(rank, world, empty=world - 1)
    collected(own, model=Scaled(), unpack=with_a_function)


def other_posteriors(rank: int, world: int) -> None:
    posterior = errbar.fit(network(), data_set(SAMPLES - rank), last_layers=1, group=False)
    posterior.update(data_set())


def other_priors(rank: int, world: int) -> None:
    posterior = errbar.fit(network(), data_set(), last_layers=1, prior=errbar.Prior(1.0 + rank))
    errbar.calibrate(posterior, data_set(20, seed=3))


def forgetting_what_was_not_seen(rank: int, world: int) -> None:
    errbar.fit(network(), data_set(10), last_layers=1).forget(data_set())


MISTAKES: dict[str, Callable[[int, int], None]] = {
    mistake.__name__: mistake
    for mistake in (
        not_a_number,
        infinite_logits,
        a_label_out_of_range,
        a_file_that_is_missing,
        a_mistake_while_others_are_busy,
        a_checkpoint_without_a_name,
        a_first_batch_without_a_tensor,
        other_weights,
        other_options,
        an_unknown_option_on_one_rank,
        other_lengths,
        other_kinds,
        nothing_at_all,
        nothing_to_calibrate_on,
        nothing_to_forget,
        other_seeds,
        one_part_twice,
        parts_that_nobody_reads,
        draws_with_replacement,
        draws_by_weight,
        no_length,
        arguments_that_cannot_be_sent,
        other_posteriors,
        other_priors,
        forgetting_what_was_not_seen,
    )
}


def failure(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The type, the sentence and the seconds of what a call raises; empty where it raises nothing."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def main(output: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    warnings.simplefilter("error")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {name: case(rank, world) for name, case in CASES.items()}
    if world > 1:
        found |= {name: failure(lambda m=mistake: m(rank, world)) for name, mistake in MISTAKES.items()}
    torch.save(found, output / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
