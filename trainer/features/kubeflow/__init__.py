"""Progress of a run in the status of its TrainJob of Kubeflow Trainer."""
