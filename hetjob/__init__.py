"""The job side of hetstream: directives, conversion to a heterogeneous job, the job master, the local backend."""
