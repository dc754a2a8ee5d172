from ..._release import missing

[QuantizedTensor] = missing("QuantizedTensor")
