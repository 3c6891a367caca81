"""Tools around a run: plans, comparisons, reports, checks, conversions, scripts. The core imports none of them."""
