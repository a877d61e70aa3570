"""Teachers of knowledge distillation: the settings of a run's teacher, its model and its ranks."""

from crosscut.config.teachers.ranks import TEACHER, TEACHER_SHARES, TEACHER_TOKENS, TeacherRanks
from crosscut.config.teachers.section import TeacherConfig, TeacherLoss
from crosscut.config.teachers.shape import teacher_model

__all__ = [
    "TEACHER",
    "TEACHER_SHARES",
    "TEACHER_TOKENS",
    "TeacherConfig",
    "TeacherLoss",
    "TeacherRanks",
    "teacher_model",
]
