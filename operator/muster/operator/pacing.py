"""Intervals at which the operator looks and writes, in one place, because they only make sense together.

The argument. A person who watches a job, and a gang that has lost a worker, both count in seconds; an etcd takes a few
thousand writes a second from everybody, and an API server or a laptop's disk must not be kept busy by jobs that do
nothing. So deaths, ends and a user's wishes are events and wait for none of these clocks (0.15 s in a cluster, so that
the pods of one gang are seen together; at half of that a gang of eight is looked at eight times, at twice that a
recovery is that much longer). What only changes words or counts waits for the next event, or 5 s: the interval at which
people refresh a page; at half of it a fleet of 5,000 running gangs writes 2,000 statuses a second instead of 1,000, at
twice it the progress of a short job is news of the past. Looks without an event are there for what no event reports
(time that passed, a lost message): every 5 s while a gang lives, because the shortest deadline that the core keeps is
about as long (core/stalls.py), and every 300 s for everything, which bounds the damage of a bug in a watch and costs
10,000 idle jobs 33 cached looks a second. Where there are many of a kind, the pause grows with their number
(…_PER_SECOND), so that the load has a ceiling and a small fleet pays nothing for a large one. Failures are retried
after 0.25 s, for most pass in that time, and at least once a minute, for a person who mended something waits for it.
"""

from __future__ import annotations

# --- one job, without an event ---
LOOK_SECONDS = 5.0  # at a gang that starts, runs or stops
MORE_SECONDS = 0.2  # between two parts of many actions: about what a watch takes to show the first
RESYNC_SECONDS = 300.0  # at every job, whatever was heard
RESYNC_RESTING = 12  # at jobs that are suspended or over, and need nothing, only in one of so many: once an hour
RESYNC_RETRY_SECONDS = 5.0  # after a resync that failed
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.25, 60.0  # after a pass that failed; doubled each time
PROGRESS_SECONDS = 4.5  # between two writes that only report progress; below LOOK_SECONDS, so that each look may write
# Gangs whose workers are being made or removed, looked at without news: so many a second, and each once in so long.
WORKERS_PER_SECOND, WORKERS_SECONDS_MAX = 10.0, 30.0
# A text about a starting gang's progress waits so long before it is written: mostly the next phase replaces it first.
# It waits longer while many gangs start; a text that names a problem waits only so long after the last write.
PROGRESS_TEXT_SECONDS, PROGRESS_TEXT_SECONDS_MAX, PROGRESS_TEXTS_PER_SECOND = 5.0, 60.0, 4.0

# --- the queue ---
ADMISSION_SECONDS = 15.0  # without news: node reads may lag, limits may change
IDLE_ADMISSION_SECONDS = 60.0  # the same while nobody waits: running gangs may be able to grow
WAIT_TEXT_SECONDS = 30.0  # a queued job's words change at most so often, unless their code changes …
WAIT_TEXTS_PER_SECOND = 20.0  # … and those of a long queue so many at a time: each is a write of a status
# A pass over a large fleet is dear: so much of the time may be spent on reading it afresh, and at most so long between.
ADMISSION_SHARE, ADMISSION_SECONDS_MAX = 0.1, 3.0

# --- what the API is told of nodes ---
# Between two looks whether it changed, and after which it is written all the same: that of 5,000 nodes has 108 KiB.
NODE_REPORT_SECONDS, NODE_REPORT_AGAIN_SECONDS = 10.0, 60.0

# --- commits ---
COMMITS_SECONDS = 60.0  # how old a listing may be where nothing tells of a new one: it costs a request to the store
# How long a store may take to answer. S3's own time-outs and retries end within it; at half of it a slow bucket would
# be called silent, at twice of it a job on a dead mount is cancelled that much later.
COMMITS_ANSWER_SECONDS = 20.0

# --- one machine ---
# Polls of the state folder are so many times rarer while no worker lives: then only a user's write can be news.
POLLS_SKIPPED_IDLE = 2.5

# --- a cluster's events ---
EVENT_SECONDS, EVENT_SECONDS_MAX = 0.15, 2.0  # how long an event waits for more of the same job …
EVENTS_PER_SECOND = 50.0  # … and longer where there is much: so many jobs and no more are looked at
LATER_SECONDS = 5.0  # how long a change of words and counts waits for an event
LATE_SECONDS, LATE_LOOKS = 0.1, 10  # how long a list that is newer than the watch waits for it
WARNINGS_SECONDS = 15.0  # a pod without an address so long after its placing: its events are read, and so often anew
GROUP_WAITING_SECONDS, GROUP_RUNNING_SECONDS = 3.0, 15.0  # between two looks at another scheduler's group
APIS_SECONDS = 60.0  # how often it is asked which schedulers' APIs are served: they may be installed after us

# Kubernetes events of jobs: at most so many writes a second. What waits is merged per job, and warnings go first. Of
# 300 jobs that start together the last event is written after 28 s, when most jobs have two or three to merge; at
# double the rate most cost one more write, at half of it somebody who watches a healthy job waits for a minute.
EVENT_WRITES_PER_SECOND, EVENT_WRITES_BURST = 10.0, 20

# --- polls of workers' heartbeats ---
POLL_STARTING_SECONDS, POLL_RUNNING_SECONDS, POLL_SUSPICIOUS_SECONDS = (
    1.0,
    4.0,
    1.0,
)  # between two to worker 0 of a gang
POLL_OTHERS_PER_SECOND = 50.0  # workers that are not the first of their gang, over all gangs
POLL_ROUND_SECONDS = 0.25
POLL_TIMEOUT_SECONDS = 3.0
POLLS_AT_ONCE = 64

# --- workers that are made and removed in a cluster ---
CREATE_RETRY_SECONDS, CREATE_RETRY_SECONDS_MAX = 1.0, 30.0  # after a rejection; doubled each time
# Where a pod was refused lately, another may be: gangs of that namespace are made behind their gate for so long.
CAREFUL_SECONDS = 600.0
# Pods of all gangs that are being made, or removed, at the same moment. Fewer than the client's connections: a gang
# that is complete must not wait with its status until all the others are made, too.
CREATE_AT_ONCE, REMOVE_AT_ONCE = 32, 32
SHARED_SECONDS = 600.0  # after which it is made sure again that what the gangs of a namespace share is still there
REMOVE_REPEAT_SECONDS = (
    30.0  # a deletion whose effect was not seen so long is asked for again: a watch may lag that much
)
