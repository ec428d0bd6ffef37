"""Several benches at once on a machine that is lent for minutes.

    python -m benchmarks.lent --data-dir FOLDER --device cuda --jobs 14 --minutes 9 --out OUT PLAN...

A plan is the name of a bench, or `name=word+word` for its rows whose names contain one of the words. Runs are made in the order of the plans, by processes that live on: each imports once,
decodes images once, and keeps what a frozen image encoder made of them. Runs that two plans share are made once. What is not finished in time is left out and named.
"""

import argparse
import contextlib
import gc
import hashlib
import multiprocessing
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count as count_up
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.study import OutOfTime, Study
from unalike.base.errors import UserError
from unalike.report import Run, read

Key = tuple[Any, ...]  # scenario, settings, seed
FEATURES: dict[bytes, dict[str, Tensor]] = {}  # by image: what the frozen encoder made of it


def main(arguments: list[str]) -> None:
    """Run the plans and write each one's JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lent")
    parser.add_argument("plans", nargs="+", metavar="PLAN")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--keep", type=Path, required=True, help="folder for finished runs")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--tf32", action="store_true", help="TF32 in matrix products")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    workers = Workers(options.jobs, options.keep, options.tf32)
    threads = []
    for order, plan in enumerate(options.plans):
        name, _, words = plan.partition("=")
        study = partial(
            LentStudy,
            workers=workers,
            order=order,
            started=started,
            data_dir=options.data_dir,
            only=tuple(word for word in words.split("+") if word),
        )
        settings: dict[str, Any] = {
            "quick": options.quick,
            "device": options.device,
            "settings": tuple(options.settings),
            "minutes": options.minutes,
        }
        arguments_of_bench = (name, options.out, study, settings)
        threads.append(threading.Thread(target=write_bench, args=arguments_of_bench))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers.close()


def write_bench(name: str, out: Path, study: Any, settings: dict[str, Any]) -> None:
    """As `unalike bench NAME`, with runs made by the workers."""
    try:
        runner.run(name, out, None, build=study, **settings)
    except Exception as error:  # another plan's tables are to be written all the same
        sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")


@dataclass(frozen=True)
class LentStudy(Study):
    """A study whose runs are made by workers; `jobs` is the number of runs it waits for.

    Attributes:
        order: of two studies' runs, those of the smaller order are made first.
    """

    jobs: int = 400
    workers: Any = None
    order: int = 0

    def once(self, scenario: str, settings: Any, seed: int) -> Run:
        """One run, by the next worker that is free."""
        assert self.workers is not None
        key = (scenario, tuple(settings), seed, self.device, self.data_dir)
        job = self.workers.submit(self.order, key)
        left = self.seconds_left()
        try:
            folder = job.result(timeout=left)
        except TimeoutError:
            raise OutOfTime(f"not finished in {self.minutes:g} minutes") from None
        return read(folder)


class Workers:
    """Processes that make runs, the most urgent first.

    Args:
        count: processes.
        keep: folder for finished runs.
        tf32: whether matrix products on a GPU round their factors to 10 bits.
    """

    def __init__(self, count: int, keep: Path, tf32: bool):
        self.keep = keep
        self.tf32 = tf32
        self.waiting: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self.jobs: dict[Key, Future[Path]] = {}
        self.orders: dict[Key, int] = {}  # by which a run waits
        self.begun: set[Key] = set()
        self.numbers = count_up()
        self.lock = threading.Lock()
        self.closed = False
        self.processes: list[Any] = []
        for _ in range(count):
            threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, order: int, key: Key) -> Future[Path]:
        """The folder of a run, once it is made; the same one for the same key."""
        with self.lock:
            if key not in self.jobs:
                self.jobs[key] = Future()
            if order < self.orders.get(key, sys.maxsize):
                self.orders[key] = order
                self.waiting.put((order, next(self.numbers), key))
            return self.jobs[key]

    def close(self) -> None:
        """End all processes."""
        self.closed = True
        for process in self.processes:
            process.kill()

    def _serve(self) -> None:
        """Hand runs to a process, and to the next one where it ended."""
        context = multiprocessing.get_context("spawn")
        process: Any = None
        pipe: Any = None
        while not self.closed:
            _, number, key = self.waiting.get()
            with self.lock:
                if key in self.begun:  # it waited twice, by two orders
                    continue
                self.begun.add(key)
            if process is None:
                pipe, far_end = context.Pipe()
                process = context.Process(target=work, args=(far_end, self.tf32), daemon=True)
                process.start()
                far_end.close()
                self.processes.append(process)
            out = self.keep / f"run-{number}"
            try:
                pipe.send((key, out))
                error = pipe.recv()
            except (EOFError, OSError):
                error = "its process ended"
            if error is None:
                self.jobs[key].set_result(out)
                continue
            self.jobs[key].set_exception(UserError(f"a run failed: {error}"))
            process.join(timeout=1)
            if not process.is_alive():
                process = None


def work(pipe: Any, tf32: bool) -> None:
    """Make the runs that arrive; answer with None, or with what went wrong."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    remember_images()
    while True:
        try:
            (scenario, settings, seed, device, data_dir), out = pipe.recv()
        except EOFError:
            return
        try:
            start = time.monotonic()
            make_run(scenario, settings, seed, device, data_dir, out)
            sys.stderr.write(f"{time.monotonic() - start:.1f} s: {' '.join(settings)}, {seed}\n")
            pipe.send(None)
        except UserError as error:
            pipe.send(str(error)[-2000:])
        except BaseException as error:  # a GPU may be of no use to this process from now on
            pipe.send(f"{type(error).__name__}: {error}"[-2000:])
            raise


def make_run(
    scenario: str, settings: Any, seed: int, device: str, data_dir: str | None, out: Path
) -> None:
    """As `unalike run SCENARIO --json --no-report`, in this process."""
    from unalike.runs import run_scenario
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load

    problems = partial(scenario_problems, folder=data_dir)
    loaded, method = load(scenario, None, list(settings), problems, seed=seed, device=device)
    with contextlib.redirect_stdout(sys.stderr):
        run_scenario(loaded, method, out=out, data_dir=data_dir, source=scenario, report=False)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def remember_images() -> None:
    """Decode a file's images once, and compute an image's features once, in this process."""
    from unalike.data import jpeg
    from unalike.methods import prompt_tuning

    voc2012: Any = import_module("unalike.data.voc2012")  # as an attribute it is the function
    decoded: dict[bytes, Any] = {}

    def decode_once(jpeg_bytes: Any, off: Any, *others: Any) -> Any:
        key = hashlib.blake2b(off.tobytes()).digest()
        if key not in decoded:
            decoded[key] = jpeg.decode_images(jpeg_bytes, off, *others)
        return decoded[key]

    voc2012.decode_images = decode_once
    prompt_tuning.encode_images = encode_once


def encode_once(model: Any, data: Any, client: Any) -> Any:
    """As `encode_images`, with the features of images that were seen in another run."""
    from unalike.data import Tensors

    x, y = data.labelled_batch(torch.arange(len(data)))
    name = f"{type(model.encoder).__name__} {model.encoder.places} {client.device} {client.dtype}"
    keys = [name.encode() + hashlib.blake2b(image.cpu().numpy().tobytes()).digest() for image in x]
    missing = torch.tensor([i for i, key in enumerate(keys) if key not in FEATURES]).long()
    for index in missing.split(128):
        seen = model.look(client.to_device(x[index]))
        for row, i in enumerate(index.tolist()):
            FEATURES[keys[i]] = {part: tensor[row] for part, tensor in seen.items()}
    features = {}
    for part in FEATURES[keys[0]]:
        features[part] = torch.stack([FEATURES[key][part] for key in keys])
    return Tensors(features, y)


if __name__ == "__main__":
    main(sys.argv[1:])
