"""How the step is made exact and fast: rooms entered through `step` and `optimizer`."""
