"""``muster.tune``: times a grid of collectors on this machine and returns the fastest."""

from muster.tuning.search import Candidate as Candidate
from muster.tuning.search import Setup as Setup
from muster.tuning.search import Tuning as Tuning
from muster.tuning.search import tune as tune
