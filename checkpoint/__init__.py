"""Flash checkpoint: model and data position as one record. Not part of this release; see the changelog."""
