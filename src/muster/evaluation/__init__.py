"""Evaluation of policies on exact numbers of episodes, without bias, in the background or between batches."""

from muster.evaluation.evaluator import Evaluator, EvaluatorStats
from muster.evaluation.result import EvaluatedEpisode, Evaluation, UnfinishedEpisode

__all__ = ["EvaluatedEpisode", "Evaluation", "Evaluator", "EvaluatorStats", "UnfinishedEpisode"]
