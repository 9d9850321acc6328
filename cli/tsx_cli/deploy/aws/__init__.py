"""What the AWS platforms share: session, policies, alarms, logs."""
