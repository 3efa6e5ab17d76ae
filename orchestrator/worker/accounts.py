"""What is counted of the engine that trains: the states, bytes, dtypes and messages of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from math import prod
from typing import Any, Protocol

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from zero_runtime.accounting import bytes_of_element, predicted_offload_bytes, predicted_state_bytes, scratch_bytes
from zero_runtime.census import ActivationCensus, HeldStates, held_by
from zero_runtime.dtype_audit import DTypeAudit
from zero_runtime.dtype_rules import AskedDTypes
from zero_runtime.dtypes import short_name
from zero_runtime.ledger import Ledger
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_bytes import formula


class Accounts(Protocol):
    """What a run records of its engine. Every rank makes the same calls."""

    @property
    def parameters(self) -> int:
        """The number of parameters of the full model."""

    def held(self) -> HeldStates:
        """The tensors of the model states on this rank now."""

    def auditing(self) -> AbstractContextManager[Any]:
        """A context around all forwards and backwards of the step whose dtypes and messages are counted."""

    def dtypes(self, ledger: Ledger) -> dict[str, dict[str, int]]:
        """After that step's update: this rank's bytes by component and dtype. ledger: of the step."""

    def states(self, measured: Mapping[str, int | None]) -> dict[str, Any]:
        """Bytes of the model states of a rank by component, predicted and, if available, measured."""

    def communication(self, ledger: Ledger) -> dict[str, Any]:
        """The messages of one steady step on one rank, with the theoretical ones."""

    def settle(self) -> None:
        """Wait for what the last step has started, which would be in the time of the next one or of none."""

    def added(self) -> dict[str, Any]:
        """What the result has besides."""


class OwnAccounts:
    """The accounts of zero-lab's own runtime."""

    def __init__(self, config: RunConfig, runtime: ZeroRuntime) -> None:
        self._config, self._runtime = config, runtime
        self._audit: DTypeAudit | None = None

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for unit in self._runtime.units for shape in unit.full_shapes.values())

    def held(self) -> HeldStates:
        return held_by(self._runtime)

    def auditing(self) -> AbstractContextManager[Any]:
        self._audit = DTypeAudit(self._runtime, self._asked_dtypes())
        return self._audit

    def dtypes(self, ledger: Ledger) -> dict[str, dict[str, int]]:
        """DTypeError on every rank if they are not those of the configuration."""
        assert self._audit is not None
        return self._audit.conclude(ledger)

    def _asked_dtypes(self) -> AskedDTypes:
        """The dtypes that the configuration asks for in the runtime's units."""
        config, rule = self._config, self._config.optimizer.rule
        return AskedDTypes(
            config.precision.mixed,
            config.batch.accumulation,
            rule.held_states,
            tuple(config.precision.keep_dtype),
            {name: short_name(dtype) for name, dtype in self._runtime.given_dtypes.items()},
            whole=rule.ns_dtype if isinstance(rule, MuonConfig) else None,
            wire=config.zero.wire,
            plan=config.zero.plan,
        )

    def states(self, measured: Mapping[str, int | None]) -> dict[str, Any]:
        runtime = self._runtime
        predicted, away = predicted_state_bytes(runtime), predicted_offload_bytes(runtime)
        return {
            "states": state_rows(asdict(predicted), measured),
            "formula": formula(
                runtime.plan,
                runtime.precision,
                micro_batches=runtime.settings.micro_batches,
                **bytes_of_element(runtime),
                matrix_state_bytes=runtime.optimizer.config.matrix_state_bytes,
                with_frozen=not all(unit.trainable for unit in runtime.units),
            )
            + (" less the offloaded shards" if away.host or away.scratch else ""),
            "scratch_bytes": scratch_bytes(runtime),
            "scratch_predicted_bytes": away.scratch,
            "host": {"predicted_bytes": away.host, "measured_bytes": measured.get("host")},
            "padding_bytes": predicted.padding,
        }

    def communication(self, ledger: Ledger) -> dict[str, Any]:
        runtime = self._runtime
        frozen = [unit for unit in runtime.units if not unit.trainable] if runtime.trains else []
        unread = {unit.name for unit in frozen if not runtime.backward_reads(unit)}
        return {
            "data": {kind: asdict(volume) for kind, volume in sorted(ledger.data.items())},
            **wings.load(wings.PREDICTED).theory(self._config, updates=runtime.optimizer.updates, unread=unread),
            "control_bytes": ledger.control.bytes,
        }

    def settle(self) -> None:
        if self._runtime.device.type == "cuda":  # the next step is issued at once, and its clock read in the stream
            return
        # Gathers of new parameters (stages 1 and 2) that went on between two steps would be in the time of neither.
        # They would also slow the reference work of these stages alone, as if these had met slower cores.
        for unit in self._runtime.units:
            unit.wait_renewed()

    def added(self) -> dict[str, Any]:
        return {}


def state_rows(predicted: Mapping[str, int | None], measured: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Rows of the components of the model states, of which `padding` is none."""
    return [
        {"component": name, "predicted_bytes": size, "measured_bytes": measured.get(name)}
        for name, size in predicted.items()
        if name != "padding"
    ]


def activations(accounts: Accounts) -> ActivationCensus:
    """A context around one forward that counts the bytes that it leaves for backward."""
    return ActivationCensus(accounts.held())
