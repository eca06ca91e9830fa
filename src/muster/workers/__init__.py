"""Workers in this thread, in threads and in processes: where groups make their rollouts.

A module uses only modules above it in this list, types included, so the folder can be read from top
to bottom (``tests/unit/test_reading_order.py`` checks that).

Processes, and what connects them:
    lifelines: a process ends with its parent
    channel: messages between two processes; wake-ups; status pages
    forkserver: forks worker processes
    launch: starts worker processes

Records:
    failures: errors of workers for the user
    requests: requests other than for rollouts
    options: the options of workers and of their supervision
    config: what a worker, a server and a pool are made from
    messages: requests for rollouts and their results

The worker:
    build: makes environments, groups and policies
    mailbox: questions to the inference server, and their answers
    responder: what answers workers that wait
    group_state: the state of groups and rollouts as plain data
    worker: groups and policies; makes rollouts
    actor: acts on rows of several workers; used by the inference server
    effects: what each request does, in the worker and in the parent
    turns: threads share the process's random generators
    gaps: requests after a rollout that failed
    main: the main loop of a worker
    threads: workers in threads

The pool:
    counters: the frame counters of each group
    under_way: the requests of one worker, until their results are taken
    life: the states and restarts of one worker
    fates: what becomes of a failed rollout and of a lost worker
    slow_construction: log messages about slow environments
    inference: the inference server
    pool: all workers, as schedules use them
    local: the pool of one worker in this thread
    supervision: starts, waits, losses and restarts
    proxy: the handle of a worker in a process or thread
    worker_pool: the pool of these workers

Schedules:
    schedule: slots, and the delivery of rollouts
    sync: every batch has a rollout of every group
    first_ready: a batch has the rollouts that are complete first
"""
