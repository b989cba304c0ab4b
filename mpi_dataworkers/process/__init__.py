"""What a process is: its settings, its interpreter, its children, its handlers. Needed by several folders."""
