"""What runs inside a pass below torch: the plan of its rows, packed and quantized weights, the compiled operators."""
