"""A search over settings with Optuna, whose journal is kept: killed and started again, it goes on.

Trials are asked for in batches, each trial with a sampler of its own seed: a trial depends on the
batches before it and on its number only. So a search ends the same however often it was killed.
"""

from pathlib import Path
from typing import Any

from unalike.base.errors import UserError

JOURNAL = "optuna.jsonl"
Settings = tuple[str, ...]  # `key=value` each


class Space:
    """What is searched: `key=1,2,3` is one of these, `key=0.001..0.1` anything between.

    Args:
        grid: one text for each key.
        split: returns the settings of a text with values between commas.
    Raises: UserError where a range is none.
    """

    def __init__(self, grid: list[str], split: Any):
        self.choices: dict[str, list[str]] = {}
        self.ranges: dict[str, tuple[float, float]] = {}
        for text in grid:
            key = text.partition("=")[0]
            if is_range(text):
                self.ranges[key] = parse_range(text)
            else:
                self.choices[key] = [setting.partition("=")[2] for setting in split(text)]

    def corners(self) -> list[Settings]:
        """Settings that together have every choice and both ends of every range."""
        count = max([2, *map(len, self.choices.values())])
        corners = []
        for place in range(count):
            own = [f"{key}={values[place % len(values)]}" for key, values in self.choices.items()]
            own += [f"{key}={_text(ends[place % 2])}" for key, ends in self.ranges.items()]
            corners.append(tuple(own))
        return corners

    def suggest(self, trial: Any) -> None:
        """Choose the values of a trial."""
        for key, values in self.choices.items():
            trial.suggest_categorical(key, values)
        for key, (low, high) in self.ranges.items():
            if isinstance(low, int) and isinstance(high, int):
                trial.suggest_int(key, low, high)
            else:  # over several powers of ten, each of them counts alike
                trial.suggest_float(key, low, high, log=low > 0 and high / low >= 10)

    def settings(self, values: dict[str, Any]) -> Settings:
        """The settings of a trial's values."""
        keys = [*self.choices, *self.ranges]
        return tuple(f"{key}={_text(values[key])}" for key in keys)


class Search:
    """Trials in a journal.

    Args:
        space: what is searched.
        folder: where the journal is.
        batch: trials that are asked for at once.
        maximum: number of trials.
    Raises: UserError without Optuna, or where the journal is of another space.
    """

    def __init__(self, space: Space, folder: Path, batch: int, maximum: int):
        try:
            import optuna
        except ImportError:
            raise UserError("--trials needs Optuna: pip install 'unalike[search]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.space = space
        self.batch = batch
        self.maximum = maximum
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            study_name="sweep",
            direction="maximize",
            load_if_exists=True,
        )

    def next_batch(self) -> list[tuple[int, Settings]]:
        """Return number and settings of the trials to run next; none when the search is over."""
        from optuna.trial import Trial, TrialState

        trials = self.study.get_trials(deepcopy=False)
        waiting = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if not waiting and len(trials) >= self.maximum:
            return []
        for trial in waiting:  # one that was killed before all its values were chosen
            if len(trial.params) < len(self.space.choices) + len(self.space.ranges):
                self.study.sampler = self._sampler(trial.number)
                self.space.suggest(Trial(self.study, trial._trial_id))
        end = len(trials) if waiting else len(trials) + 1
        end = min(self.maximum, -(-end // self.batch) * self.batch)
        for number in range(len(trials), end):
            self.study.sampler = self._sampler(number)
            self.space.suggest(self.study.ask())
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [(trial.number, self.space.settings(trial.params)) for trial in running]

    def _sampler(self, number: int) -> Any:
        from optuna.samplers import TPESampler

        first = min(10, 1 + self.maximum // 3)  # trials that are drawn at random
        return TPESampler(seed=number, n_startup_trials=first, constant_liar=True)

    def tried(self) -> list[Settings]:
        """Settings of all trials that are over, each once, in order."""
        trials = self.study.get_trials(deepcopy=False)
        over = [trial for trial in trials if trial.state.is_finished()]
        return list(dict.fromkeys(self.space.settings(trial.params) for trial in over))

    def tell(self, number: int, score: float | None) -> None:
        """Record what came of a trial; None where it failed."""
        from optuna.trial import TrialState

        if score is None:
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, score)


def is_range(text: str) -> bool:
    """Return whether a text is `key=low..high`.

    >>> is_range("lr=0.001..0.1"), is_range("lr=0.001,0.1")
    (True, False)
    """
    return ".." in text.partition("=")[2]


def parse_range(text: str) -> tuple[float, float]:
    """Return both ends; whole numbers where both are written as such.

    >>> parse_range("lr=0.001..0.1"), parse_range("peers=1..5")
    ((0.001, 0.1), (1, 5))
    """
    _, _, values = text.partition("=")
    ends: list[float] = []
    for part in values.split(".."):
        try:
            ends.append(int(part))
        except ValueError:
            try:
                ends.append(float(part))
            except ValueError:
                ends = []
                break
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise UserError(f'--set takes key=low..high with two rising numbers, got "{text}"')
    return ends[0], ends[1]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
