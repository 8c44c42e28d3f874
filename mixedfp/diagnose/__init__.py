"""The effect of 16 bits on a model: reports, overflow sources, an audit, memory."""
