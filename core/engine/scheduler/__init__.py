"""Scheduling: which tokens of which sequences the next step computes. Integers only; nothing here knows a device."""

from .config import SchedulerConfig, SchedulerStats, check_policy
from .policy import POLICIES, Policy
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .step import FROM_HISTORY, ScheduledSequence, ScheduledStep, Swap, Update

__all__ = [
    "FROM_HISTORY",
    "POLICIES",
    "Policy",
    "ScheduledSequence",
    "ScheduledStep",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Sequence",
    "SequenceStatus",
    "Swap",
    "Update",
    "check_policy",
]
