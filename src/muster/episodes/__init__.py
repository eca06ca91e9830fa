"""The single model of an episode, used by batches, ``collect(n_episode=)``, evaluation, statistics
and recordings.

``record``: finished episodes. ``clock``: the current episodes of a group. ``segment``: the episodes
in a batch. ``whole``: episodes joined over batches. ``rules``: which episodes count or are next.
``summary``: their statistics.
"""
