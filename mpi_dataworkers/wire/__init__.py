"""What crosses between processes: messages, their bytes, and where a service is."""
