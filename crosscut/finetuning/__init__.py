"""Fine-tune trained models on conversations (`chat`) or for tasks with labels (`downstream`). `tasks` reads the tasks'
files and computes their scores.
"""
