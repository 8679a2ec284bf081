"""What a plan, a run or a device looks like in a terminal: functions from results to things that rich prints."""
