"""Asks Optuna for the next trials of a search. The only module that imports it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping

import optuna
from optuna.trial import TrialState

from orchestrator.wings.optuna.space import SearchLine
from orchestrator.wings.optuna.trials import Trial

MOST_ASKED = 200  # proposals in a row; one that repeats an earlier trial is passed over
optuna.logging.set_verbosity(logging.WARNING)

Values = tuple[str, ...]  # of what is searched, as they are typed


def proposed(line: SearchLine, known: Mapping[Values, Trial], count: int, *, higher_first: bool) -> list[Values]:
    """Up to `count` new trials; fewer, or none, where Optuna repeats earlier ones.

    They depend only on the outcomes of the known trials in their order: a search that was interrupted continues with
    the trials that it would have made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 2 calls experimental what all later versions kept
        sampler = optuna.samplers.TPESampler(seed=len(known))
        study = optuna.create_study(direction="maximize" if higher_first else "minimize", sampler=sampler)
        for values, outcome in known.items():
            _tell(study, line, values, outcome)
        new: dict[Values, None] = {}
        for _ in range(MOST_ASKED):
            values = _suggested(study.ask(), line)
            if values not in known:
                new[values] = None
            if len(new) == count:
                break
    return list(new)


def _tell(study: optuna.Study, line: SearchLine, values: Values, outcome: Trial) -> None:
    pairs = zip(line.searched, values, strict=True)
    study.enqueue_trial({one.key: text if one.values else float(text) for one, text in pairs})
    trial = study.ask()
    _suggested(trial, line)
    value = math.nan if outcome.value is None else outcome.value
    if math.isfinite(value):
        study.tell(trial, value)
    else:  # the sampler takes a pruned trial for the worst, and forgets a failed one
        is_bad = outcome.value is not None or outcome.fits_not or outcome.diverged
        study.tell(trial, state=TrialState.PRUNED if is_bad else TrialState.FAIL)


def _suggested(trial: optuna.Trial, line: SearchLine) -> Values:
    values = []
    for one in line.searched:
        if one.values:
            values.append(str(trial.suggest_categorical(one.key, one.values)))
        elif one.is_whole:
            values.append(one.typed(trial.suggest_int(one.key, int(one.low), int(one.high), log=one.is_log)))
        else:
            values.append(one.typed(trial.suggest_float(one.key, one.low, one.high, log=one.is_log)))
    return tuple(values)
