"""How insight is shown: tables, charts, a page, metrics."""
