"""The site daemon `hetstreamd`: it reads the cluster, keeps its history, and divides data workers among jobs.

It changes nothing in Slurm and needs no rights: jobs ask, and act on the answer as their own users.
"""
