"""Matrix products of wide layers in fp8."""
