"""Times and numbers by which the dispatcher decides. How often its peers report is in `wire/work.py`."""

from __future__ import annotations

# A worker is lost when it was silent this long and has no work. One that works may hold the GIL: while its connection
# is alive, its sample has the time that the program gives a sample.
WORKER_TIMEOUT_S = 4.0
# A trainer may hold the GIL in a long call; taking it for dead only pauses its prefetch, it registers again by itself.
LOADER_TIMEOUT_S = 15.0
# A sent lease that the loader does not report within this time went to a broken connection.
ARRIVAL_TIMEOUT_S = 5.0
# A loader silent for longer is held up (the GIL in a long call): its reports are late, not its batches.
LOADER_PAUSE_S = ARRIVAL_TIMEOUT_S / 2
# A worker that could not reach a loader is not sent there again for this long.
UNREACHABLE_S = 10.0
# A loader that divides its data, and that another rank has not made by then, is told.
LONELY_AFTER_S = 60.0
# One whose program runs another Python than the data workers is told; they may be about to start in its own.
UNFIT_AFTER_S = 5.0
# After a restart, wait at most this long for the workers of before to tell what they hold, so that the same steps are
# not leased to others. They register as soon as their connection is back; who is later loses only what it held.
RECOVERY_GRACE_S = 0.7

# One lease in work and one waiting: the worker never idles for a round trip.
LEASES_PER_WORKER = 2
# Long enough that control costs nothing, short enough that the tail of a window is shared among workers.
TARGET_LEASE_S = 0.02
MAX_LEASE_STEPS = 128
# A steal has to bring the end of the stolen lease forward by this much; what a worker does next is looked at as often.
STEAL_GAIN_S = TARGET_LEASE_S
