"""The session, policies, alarms and logs that the AWS targets share."""
