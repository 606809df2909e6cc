"""What a job is: its fields, the job file, validation, the cluster topology and how parameters are sharded."""
