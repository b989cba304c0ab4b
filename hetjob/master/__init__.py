"""The job master: one control process per job. `state.py` decides, `server.py` acts."""
