"""Points of the agents and of the coordinator at which a test can have one die or stop (`base/faults.py`)."""

from __future__ import annotations

from hetstream.base.faults import InjectionPoints
from hetstream.hetjob.gpu.config import faults_from_environment

POINTS = {
    "agent.connected": "the coordinator has accepted a connection and knows nothing of the process",
    "agent.introduced": "the process has said who it is and has no answer",
    "agent.answered": "it has its pages and has mapped nothing",
    "agent.reporting": "its statistics are to be written",
    "agent.reported": "its statistics are written, and the coordinator has not been woken",
    "agent.boundary": "a mini-batch has ended and nobody knows",
    "agent.limited": "it keeps to a limit, and has not said so",
    "agent.pausing": "it waits for leave to launch",
    "coordinator.accepted": "a process has connected and nothing of it is read",
    "coordinator.heard": "a first message has come and nothing is decided",
    "coordinator.pages_made": "a process is admitted, and its pages are nobody's but the coordinator's",
    "coordinator.answered": "it has its pages, and no order",
    "coordinator.decided": "orders are made and not written",
    "coordinator.ordered": "the next process's order is written, those of the others are not",
}
FAULTS = InjectionPoints("HETSTREAM_GPU_FAULT", POINTS, faults_from_environment())
reach = FAULTS.reach
