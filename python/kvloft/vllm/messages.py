"""What crosses between the two halves inside vLLM's envelopes: StepPlan down, StepReports up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvloft.seam.plan import StepPlan, StepReport
from kvloft.vllm.compat import KVConnectorWorkerMetadata


@dataclass
class KVLoftMetadata(KVConnectorMetadata):
    """Scheduler to every worker, each step."""

    plan: StepPlan


@dataclass
class KVLoftWorkerMetadata(KVConnectorWorkerMetadata):
    """Every worker to the scheduler; one report a rank, concatenated."""

    reports: list[StepReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVLoftWorkerMetadata)
        return KVLoftWorkerMetadata(self.reports + other.reports)
