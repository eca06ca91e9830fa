"""The one model of an episode, used by batches, ``collect(n_episode=)``, evaluation, statistics and recordings.

``record``: finished episodes. ``clock``: the episodes that a group is in. ``segment``: the episodes in a batch.
``whole``: episodes joined over batches. ``rules``: which episodes count or come next. ``summary``: statistics of them.
"""
