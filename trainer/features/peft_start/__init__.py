"""Adapters that begin with the factors of a folder of PEFT: the key `model.adapter.start_folder`."""
