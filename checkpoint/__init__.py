"""Flash checkpoint: model, optimizer, generators and data position as one record, in memory first, on disk behind."""
