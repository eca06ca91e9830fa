"""How good a policy is: exact numbers of episodes, without bias, beside the training or between its batches."""

from muster.evaluation.evaluator import Evaluator, EvaluatorStats
from muster.evaluation.result import EvaluatedEpisode, Evaluation, UnfinishedEpisode

__all__ = ["EvaluatedEpisode", "Evaluation", "Evaluator", "EvaluatorStats", "UnfinishedEpisode"]
