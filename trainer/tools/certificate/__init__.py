"""`trainer certify`: whether layouts train the same, and the first tensor that differs."""
