"""The job: everything that a user sets for one training run, in one TOML file."""

from moesaic.facts.job.balance import BalanceConfig, BalanceCosts
from moesaic.facts.job.clicks import ClicksConfig, StreamConfig
from moesaic.facts.job.control import ControlConfig, ControlValues
from moesaic.facts.job.credibility import CredibilityConfig
from moesaic.facts.job.ctr import CtrJob
from moesaic.facts.job.data import DataConfig
from moesaic.facts.job.distill import DistillConfig, StudentConfig, students_in_order
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.job.job import Job, student_job, teacher_job
from moesaic.facts.job.memory import MemoryConfig
from moesaic.facts.job.model import ModelConfig, Preset
from moesaic.facts.job.recommender import RecommenderConfig
from moesaic.facts.job.routing import RoutingConfig
from moesaic.facts.job.table import TableConfig
from moesaic.facts.job.train import (
    CheckpointConfig,
    KernelsConfig,
    LayoutConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "BalanceConfig",
    "BalanceCosts",
    "CheckpointConfig",
    "ClicksConfig",
    "ControlConfig",
    "ControlValues",
    "CredibilityConfig",
    "CtrJob",
    "DataConfig",
    "DistillConfig",
    "FinetuneConfig",
    "Job",
    "KernelsConfig",
    "LayoutConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Preset",
    "RecommenderConfig",
    "RoutingConfig",
    "ScheduleConfig",
    "StreamConfig",
    "StudentConfig",
    "TableConfig",
    "TrainConfig",
    "student_job",
    "students_in_order",
    "teacher_job",
]
