"""How long a training step takes with which resources, after DLRover-RM (Wang et al., VLDB 2024), and plans from that.

`terms.py` has the parts of a step, `step_time.py` their sum or maximum, `fit.py` the slopes from measurements,
`identify.py` what measurements cannot tell apart and what to measure next. `plan.py` is the front of gain and cost of
one job, `joint.py` a choice for many jobs, `nsga2.py` DLRover-RM's own way to it. hetstream divides by what a running
job measures; these are what it is compared with.
"""
