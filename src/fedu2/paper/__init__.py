"""The paper's tables and figures as experiments: what to run, what was published, and what our records say."""
