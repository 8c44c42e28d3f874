"""A plugin for pytest: the nets of skorch's own tests have the mixin; `make test-skorch`."""

import skorch

from mixedfp.skorch import MixedPrecisionMixin

NETS = "NeuralNet NeuralNetClassifier NeuralNetBinaryClassifier NeuralNetRegressor"

for _name in NETS.split():
    _own = getattr(skorch, _name)
    globals()[_name] = type(_name, (MixedPrecisionMixin, _own), {"__module__": __name__})
    setattr(skorch, _name, globals()[_name])
