"""hetstream on a machine: files, services, manual pages, and what is wrong with a configuration."""
