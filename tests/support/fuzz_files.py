"""Reads mutated files, in a process whose memory is limited: `python tests/support/fuzz_files.py COUNT SEED FOLDER`.

Prints one JSON object: how many files were refused, how many read, and what went wrong: an exception that is no
`ErrbarError`, damage that was not noticed, or a file that took longer than a few seconds. A file that asks for more
memory than there is gets a `MemoryError` here, which is none of errbar's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random

import torch

import errbar
import make_format_files
import mutations
from places import FORMAT_FILES

_ALLOWED_BYTES = 192 * 2**20
_SLOW_SECONDS = 5.0


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ALLOWED_BYTES, used + _ALLOWED_BYTES))


def originals(folder: Path) -> dict[str, bytes]:
    """Whole files of every kind: those of `make_format_files`, such without factors, other priors, a checkpoint."""
    found = {path.name: path.read_bytes() for path in sorted(FORMAT_FILES.glob("*.safetensors"))}
    path = folder / "original.safetensors"
    for name in make_format_files.OPTIONS:
        posterior = make_format_files.posterior(name)
        posterior.save(path)
        found[f"{name} without factors"] = path.read_bytes()
    posterior = make_format_files.posterior("diag")
    for prior in (errbar.Prior({"0": 1.0, "2": 2.0}), errbar.Prior(torch.ones(posterior.information.n_parameters))):
        posterior.with_prior(prior).save(path, factors=True)
        found[f"{type(prior.precision).__name__} prior"] = path.read_bytes()
    path.unlink()
    collect(path, make_format_files.model())
    found["checkpoint"] = path.read_bytes()
    return found


def collect(path: Path, model: torch.nn.Module) -> None:
    errbar.collect(model, make_format_files.data(), last_layers=2, structure="kron", checkpoint=path, every=1)


def use(path: Path, model: torch.nn.Module) -> None:
    """All that can be done with a file."""
    errbar.verify(path, model)
    if errbar.info(path).kind == "checkpoint":
        collect(path, model)
        return
    errbar.merge([path]).dense()
    posterior = errbar.load(path, model)
    x, labels = make_format_files.data()[0]
    posterior.predict(x, samples=10)
    posterior.joint_logits(x[:2])
    posterior.update([(x, labels)]).log_evidence()


def main(count: int, seed: int, folder: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    model = make_format_files.model()
    path = folder / "mutated.safetensors"
    whole = originals(folder)
    for data in whole.values():
        path.write_bytes(data)
        use(path, model)
    limit_memory()
    warnings.simplefilter("ignore")
    refused = read = 0
    wrong: list[str] = []
    for index in range(count):
        random = Random(f"{seed}-{index}")
        name = random.choice(list(whole))
        is_damage = random.random() < 0.4
        path.write_bytes((mutations.damaged if is_damage else mutations.hostile)(whole[name], random))
        start = time.monotonic()
        try:
            use(path, model)
            read += 1
            if is_damage:
                wrong.append(f"{seed}-{index} {name}: damage was not noticed")
        except errbar.ErrbarError as error:
            refused += 1
            if len(str(error)) > 1000 or "\x1b" in str(error):
                wrong.append(f"{seed}-{index} {name}: the error is no sentence")
        except Exception:
            wrong.append(f"{seed}-{index} {name}: {traceback.format_exc()[-1500:]}")
        if time.monotonic() - start > _SLOW_SECONDS:
            wrong.append(f"{seed}-{index} {name}: took {time.monotonic() - start:.1f} s")
    return {"refused": refused, "read": read, "wrong": wrong}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
