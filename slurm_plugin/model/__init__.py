"""How long a training step takes with which resources, and what follows from it (DLRover-RM, VLDB'24, 4.1 to 4.3).

    observations -> fit -> StepTimeModel -> plans of one job -> the cluster's choice
    ended jobs -> JobHistory -> alike jobs -> Proposal for a new submission

    terms.py            what a step's time is made of, as columns over configurations
    step_time.py        a fitted model: predictions with their uncertainty
    fit.py              scaled non-negative least squares (the home of scipy)
    identify.py         which terms the observations cannot tell apart, and what to try next
    pareto.py           exact fronts and their hypervolume
    plan.py             the plans of one job, by enumeration
    joint.py            plans of several jobs together, exact and by marginal upgrades
    nsga2.py            the same by NSGA-II (the home of pymoo)
    past_job.py         what is kept of a job that ended
    job_history.py      where it is kept (SQLite)
    alike.py            the most similar past jobs, and a start from them

Everything but `history.py` is pure. Nothing here needs torch or Slurm.
"""
