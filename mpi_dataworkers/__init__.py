"""The data side of hetstream: order, dispatcher, data workers, transports, loader.

The name is historical: MPI is one of several transports on which batches travel (`transports/`).
"""
