"""What is tried, a module each: `seeds()`, `one_input(data)`; where chance will not do, `mutate` and `hostile()`."""
